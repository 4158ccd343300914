"""One checkpoint search algorithm a file, one signature, one explicit registry."""
