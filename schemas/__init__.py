"""The contract that hosts and the control node share: JSON Schemas, and the dataclasses they describe."""

VERSION = "0.1.0"
