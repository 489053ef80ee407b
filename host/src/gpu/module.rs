use super::launch::Kernel;
use crate::Result;
pub(crate) fn load(
    _d: &dyn super::driver::Driver,
    _i: &super::images::Image,
    _l: &[&[fusewire_device::native::KernelInfo]],
) -> Result<Vec<(&'static str, Kernel)>> {
    Ok(vec![])
}
