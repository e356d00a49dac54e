"""Hold the serving core to another engine's decision log, step by step."""
