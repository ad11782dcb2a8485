"""Tasks that the installed lm-evaluation-harness itself runs: `task=lm_eval/NAME`, and groups in its files."""
