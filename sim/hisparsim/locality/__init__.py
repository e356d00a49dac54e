"""How selections move from step to step: the process, cache replacement, miss curves and profiles."""
