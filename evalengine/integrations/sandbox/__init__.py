"""Runs programs that a model wrote, each in a process of its own, within limits. This is no security boundary:
`tasks/README.md` ("Code that a model wrote") says what it does not protect against."""
