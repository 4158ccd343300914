"""Reports for users: typed figures (`data`), their wording (`text`), and two media (`terminal`, `html`)."""
