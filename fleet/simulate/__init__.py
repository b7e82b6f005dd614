"""Fleets that do not exist, drawn from what real GPUs measured: for sizing, demonstrations, training and tests.

Everything here is marked `simulated`, in the plan and in each record; the report says SIMULATED whatever it decides.
"""
