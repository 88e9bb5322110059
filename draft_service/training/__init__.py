"""Training of drafters: responses of the target itself, the DFlash recipe, and how good the result is."""
