"""Replicas of the engine on Ray Core: one run, shared among engines on one machine or many.

The driver plans, hands out leases of requests and takes the answers; each replica is an ordinary `LLM` in an actor.
Ray places and watches the actors; nothing here imports it before a run needs it.
"""
