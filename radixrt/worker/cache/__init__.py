"""What a worker has cached: KV pages and recurrent states, on the device and in host memory."""
