"""Decisions of a serving engine, clock-free: requests, ledgers, scheduler, plans and residency policies."""
