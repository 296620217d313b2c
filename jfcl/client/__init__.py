"""What one client does in a round: losses, local training, noise, augmentation."""
