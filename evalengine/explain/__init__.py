"""Where two runs part: an item is run again in both configurations, and every op's output is compared by bytes.

    rerun -> trace -> align -> table

`rerun` and `record` drive the engine; all else is plain numbers, so that two files compare without torch.
"""
