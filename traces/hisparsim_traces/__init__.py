"""Read, describe and synthesise LLM serving traces."""
