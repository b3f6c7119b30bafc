"""The loop around a method: plan, step, checkpoint, metrics, evaluation, report."""
