"""Random draws that do not depend on the order of calls: a hash of (seed, request, index).

The simulator and the real runner draw the same acceptances, whatever the policy or the schedule.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def uniform(seed: int, request_id: int, index: int, draw: int) -> float:
    """A number in [0, 1) for one draw (SplitMix64's finaliser over the mixed counters)."""
    state = (seed * 0x9E3779B97F4A7C15 + request_id * 0xD1B54A32D192ED03) & _MASK
    state = (state + index * 0x8CB92BA72F3D8DD7 + draw * 0xAAAAAAAAAAAAAAAB + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((state ^ (state >> 31)) >> 11) * 2.0**-53


def tokens_of_verify_step(
    seed: int, request_id: int, output_tokens: int, draft_tokens: int, acceptance: float
) -> int:
    """Tokens that a verify step yields: 1 plus the drafts accepted before the first rejection."""
    accepted = 0
    while accepted < draft_tokens and uniform(seed, request_id, output_tokens, accepted) < acceptance:
        accepted += 1
    return 1 + accepted
