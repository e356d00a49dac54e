"""What is simulated: model, node, parallelism, KV layout, serving limits, and the scenario of them all."""
