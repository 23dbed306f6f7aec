"""Pages: feature maps kept between segments, in device or host memory or on disk."""
