"""Multi-latent attention: keys and values are projections of one small latent of each token."""
