"""How good a trained model is: validation loss, restored images, and metrics of them."""
