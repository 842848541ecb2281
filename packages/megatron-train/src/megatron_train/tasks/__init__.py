"""What is trained: models, losses and their denominators, each behind the same contract."""
