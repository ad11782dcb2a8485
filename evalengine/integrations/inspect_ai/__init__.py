"""evalengine as a model of inspect_ai: `inspect eval TASK --model evalengine/MODEL`, in process."""
