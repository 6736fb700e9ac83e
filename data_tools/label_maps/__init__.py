"""Images with label maps: COCO Panoptic, NYU Depth v2 and synthetic scenes."""
