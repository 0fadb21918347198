"""Sites on several devices: sharded, in `shard_map`, with explicit axes, and searches for a device that is not here."""
