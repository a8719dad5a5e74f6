"""How good results are: metrics and pictures of images and volumes, FID and CLIP score."""
