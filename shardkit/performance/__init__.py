"""What holds training back: `bench` compares, `doctor` explains, `Monitor` watches."""
