"""Seeded draws. Every purpose has a stream of its own, so adding one never changes another."""

from __future__ import annotations

import math
import zlib

import numpy as np

from .trace import Floats


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The generator of one purpose."""
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(purpose.encode())]))


def exponential(uniform: Floats) -> Floats:
    """Mean-1 exponentials by inversion. [n] -> [n]"""
    return np.asarray(-np.log1p(-uniform))


def normal_pair(rng: np.random.Generator, n: int, correlation: float) -> tuple[Floats, Floats]:
    """Two standard normals of the given correlation (Box-Muller). [n], [n]"""
    radius = np.sqrt(2 * exponential(rng.random(n)))
    angle = 2 * math.pi * rng.random(n)
    first, other = radius * np.cos(angle), radius * np.sin(angle)
    return first, correlation * first + math.sqrt(1 - correlation**2) * other


def normal_cdf(x: Floats) -> Floats:
    """Probability below x under the standard normal. [n] -> [n]"""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x.tolist()])


def by_knots(uniform: Floats, knots: list[tuple[float, float]]) -> Floats:
    """Inverse distribution through (probability, value) knots, straight in log(1 + value) between them. [n]
    -> [n]
    """
    p = np.array([knot[0] for knot in knots])
    v = np.log1p(np.array([knot[1] for knot in knots]))
    return np.asarray(np.expm1(np.interp(uniform, p, v)))


def gaps(rng: np.random.Generator, n: int, process: str, cv: float) -> Floats:
    """Mean-1 gaps of a renewal process with the given coefficient of variation. [n]"""
    if process == "gamma":
        shape = 1 / cv**2
        return rng.standard_gamma(shape, n) / shape
    if process == "weibull":
        shape = weibull_shape(cv)
        return np.asarray(exponential(rng.random(n)) ** (1 / shape) / math.gamma(1 + 1 / shape))
    return exponential(rng.random(n))


def weibull_shape(cv: float) -> float:
    """The shape whose coefficient of variation is `cv`, by bisection."""

    def cv_of(shape: float) -> float:
        log_ratio = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
        return math.sqrt(math.expm1(log_ratio)) if log_ratio < 700 else math.inf

    low, high = 0.05, 50.0  # CVs from about 1e9 down to 0.025
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cv_of(middle) > cv else (low, middle)
    return low
