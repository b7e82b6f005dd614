"""Simulate fleets with figures drawn from measurements of real GPUs.

Purposes: sizing control nodes, demonstrations, training operators, and tests.

The plan and each record are marked as `simulated`. The report says SIMULATED, whatever its decision.
"""
