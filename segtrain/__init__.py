"""segtrain: LoRA fine-tuning on MLX with segmented backward."""

__version__ = "0.1.0"
