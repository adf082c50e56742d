from fp8plan.cli import main

if __name__ == "__main__":
    main()
