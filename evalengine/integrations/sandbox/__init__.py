"""Runs programs that a model wrote, each in its own process, within limits. This is no security boundary:
`tasks/README.md` ("Code that a model wrote") says what it does not protect against."""
