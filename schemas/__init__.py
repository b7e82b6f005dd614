"""The contract between GPU hosts and the control node: JSON Schemas, and the dataclasses that they describe."""

VERSION = "2.0.0"
