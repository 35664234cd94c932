"""The trained model, its contexts, its workload, and the server they run on."""
