"""Policies that decide whose turn it is: how service is shared among the tenants whose requests wait in one class.

A policy is pure: `cost(prompt_tokens, output_tokens)` says what a request counts for, and `tenant(request)` for whom.
The rooms:

    base       the contract, and what is said about a turn
    ranking    names in the order of numbers that change
    shares     the counters of the tenants that wait at one place, by class
    none       one tenant for all: first come, first served
    vtc        the virtual token counter
    registry   the policies by name

`policies.dispatch.sharing` charges and settles the counters, of which there are two sets: of the queue before prefill,
and of the pool of computed prompts.
"""
