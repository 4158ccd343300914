"""What a solver sees, what it decides, and the judge of the result."""
