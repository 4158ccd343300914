"""One small gradient rule an operator; each rule records what it reads."""
