import os
import warnings

os.environ.setdefault("WANDB_MODE", "disabled")  # a test that wants W&B says so
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore", message=".*does not have many workers.*")
