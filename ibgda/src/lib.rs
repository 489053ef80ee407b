//! Reserved for IBGDA: the mlx5 work queue entries, doorbells and completions with which a GPU
//! drives an RDMA NIC without the CPU.
//!
//! The crate is empty for now. It has no dependencies, and `fusewire-device` depends on it so that
//! the dependency order does not change later.
#![no_std]
