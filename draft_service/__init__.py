"""The draft service: owns the DFlash drafter and grows DDTree candidate trees from its marginals."""
