// Package vm runs programs on another kernel than this machine's: it packs a Debian kernel, a few
// Debian packages and the programs into an initramfs, boots that in qemu, and brings back what the
// programs print and how they end. The virtual machine has no disk and no network card.
package vm
