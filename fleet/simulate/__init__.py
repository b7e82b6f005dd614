"""Simulate fleets with figures drawn from measurements of real GPUs, for sizing, demonstrations, training and tests.

The plan and each record are marked as `simulated`. The report says SIMULATED, whatever its decision.
"""
