"""The disk tier beside the kernel's swap and other ways to need less memory, on a machine without a GPU."""
