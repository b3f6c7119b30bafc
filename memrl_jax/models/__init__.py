"""Language models: one decoder, the pure functions that training and sampling call, and weight files."""
