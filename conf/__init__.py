"""The Hydra configuration: `config.yaml`, and one folder a group (task, model, engine, experiment)."""
