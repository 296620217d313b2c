"""One client's part of a round: losses, local training, noise, augmentation."""
