"""What a trained model is worth: held-out loss, restored pictures, and figures about them."""
