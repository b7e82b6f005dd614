"""Whether a higher or a lower value of an observation is better, by its unit or by the last component of its name."""

RATE_UNITS = frozenset({"B/s", "FLOP/s", "FLOP/J", "FLOP/cycle", "images/s", "tokens/s", "1/s", "transfers/s"})
"""Units in which a higher value is better."""
HIGHER_IS_BETTER = frozenset(
    {
        "accuracy", "mfu", "tested_share", "hidden_share", "sufficiency", "generation", "width", "active_links", "work",
        "work_share", "kept_share", "amplitude",
    }
)  # fmt: skip
"""Last components of observation names: a higher value is better."""
LOWER_IS_BETTER = frozenset(
    {
        "latency", "graph_latency", "step_time", "save_time", "restore_time", "duration", "slowdown", "loss", "loss_ratio",
        "throttled_share", "first_token", "token_interval", "deviation", "replays", "failed", "pending", "last_seen",
        "temperature",
    }
)  # fmt: skip
"""Last components of observation names: a lower value is better."""
MUST_BE_ZERO = frozenset(
    {
        "wrong_elements",
        "wrong_words",
        "wrong_blocks",
        "wrong_bytes",
        "misread_bytes",
        "wrong_products",
        "mismatches",
        "wrong_peer_copies",
        "wrong_tokens",
        "wrong_losses",
        "wrong_parameters",
        "uncorrectable_volatile",
    }
)
"""Last components of observation names: the value must be zero."""
