"""RaggedFSDP: fully sharded data parallel training that cuts no block and copies nothing."""
