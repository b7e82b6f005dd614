"""The contract between GPU hosts and the control node: JSON Schemas, and the dataclasses that they describe."""

VERSION = "1.0.0"
