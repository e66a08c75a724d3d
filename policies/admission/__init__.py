"""Policies that decide whether a request is taken at all: at its arrival, and again before its prompt is computed.

A policy is pure: `judge(case, outlook)` returns a judgement (`base`). The rooms:

    base       the contract: what a policy sees, and what a judgement is
    rates      service rates of workers, measured from what they have done
    open       takes every request
    by_wait    takes the requests whose first token is expected within their objective
    registry   the policies by name

`policies.dispatch.gate` makes the outlook and carries the judgements out.
"""
