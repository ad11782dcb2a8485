"""Models that no family of `evalengine.models.families` computes, run by transformers' own module.

The module's attention is the engine's (`attention`), its experts are summed in a fixed order (`experts`), everything
else is transformers' code inside the batch-invariant mode. `describe` finds out without weights how it attends,
`model` runs it, and `trial` refuses it before the first request if a row's bits could depend on other rows.
"""
