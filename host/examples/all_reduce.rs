//! Runs one rank of an all_reduce. `fusewire run`, `torchrun --no_python`, `mpirun` or `srun`
//! starts the ranks:
//!
//! ```text
//! cargo build --release -p fusewire --example all_reduce
//! mpirun -n 2 target/release/examples/all_reduce
//! ```

use fusewire::{Communicator, Device, Options, ReduceOp};

fn main() -> fusewire::Result<()> {
    let comm = Communicator::from_env(Device::Cpu, Options::default())?;
    let mut x = [comm.rank() as f32 + 1.0; 4];
    comm.all_reduce(&mut x, ReduceOp::Sum)?;
    println!("rank {} of {}: {x:?}", comm.rank(), comm.size());
    Ok(())
}
