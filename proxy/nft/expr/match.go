package expr

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"
)

// Reg is the register that the helpers below use.
const Reg = unix.NFT_REG_1

// Register returns the kernel's number of a register of four bytes. Every fourth also has the name
// of the 16 bytes that start there, which is the one that the kernel and nft use.
func Register(word uint32) uint32 {
	if word%4 == 0 {
		return unix.NFT_REG_1 + word/4
	}
	return unix.NFT_REG32_00 + word
}

// Host16 and Host32 return a number in this machine's byte order, which registers have.
func Host16(n uint16) []byte { return binary.NativeEndian.AppendUint16(nil, n) }

// Host32 is Host16 for 32 bits.
func Host32(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

// Join returns lists one after the other.
func Join(parts ...List) List { return slices.Concat(parts...) }

// Load loads bytes of a header into a register.
func Load(register uint32, base PayloadBase, offset, length uint32) Any {
	return &Payload{DestRegister: register, Base: base, Offset: offset, Len: length}
}

// Compare matches if the comparison of Reg with data holds.
func Compare(op CmpOp, data ...byte) Any { return &Cmp{Op: op, Register: Reg, Data: data} }

// Edit keeps the bits of mask in Reg, and then flips those of flip.
func Edit(mask, flip []byte) Any {
	return &Bitwise{SourceRegister: Reg, DestRegister: Reg, Len: uint32(len(mask)), Mask: mask, Xor: flip}
}

// Keep keeps the bits of mask in Reg.
func Keep(mask ...byte) Any { return Edit(mask, make([]byte, len(mask))) }

// IsProtocol matches packets of a transport protocol (CmpOpEq) or of others (CmpOpNeq).
func IsProtocol(op CmpOp, protocol byte) List {
	return List{&Meta{Key: MetaKeyL4PROTO, Register: Reg}, Compare(op, protocol)}
}

// CameIn matches packets that came in by the interface of a name (CmpOpEq) or not by it (CmpOpNeq).
func CameIn(op CmpOp, name string) List {
	padded := make([]byte, unix.IFNAMSIZ)
	copy(padded, name)
	return List{&Meta{Key: MetaKeyIIFNAME, Register: Reg}, Compare(op, padded...)}
}

// HasBits matches if a number of 32 bits that load loads into Reg has some of the bits.
func HasBits(load Any, bits uint32) List { return hasBits(load, bits, CmpOpNeq) }

// HasNoBits matches if it has none of them.
func HasNoBits(load Any, bits uint32) List { return hasBits(load, bits, CmpOpEq) }

func hasBits(load Any, bits uint32, op CmpOp) List {
	return List{load, Keep(Host32(bits)...), Compare(op, 0, 0, 0, 0)}
}

// State loads the state that connection tracking sees a packet in.
func State() Any { return &Ct{Key: CtKeySTATE, Register: Reg} }

// In matches if the key that starts at Reg is in a set.
func In(set string) List { return List{&Lookup{SourceRegister: Reg, SetName: set}} }

// NotIn matches if it is not.
func NotIn(set string) List { return List{&Lookup{SourceRegister: Reg, SetName: set, Invert: true}} }

// Drop ends a packet's way.
func Drop() List { return List{&Verdict{Kind: VerdictDrop}} }

// Accept ends the chains of a hook.
func Accept() List { return List{&Verdict{Kind: VerdictAccept}} }

// Goto goes on in another chain and does not come back to this one.
func Goto(chain string) List { return List{&Verdict{Kind: VerdictGoto, Chain: chain}} }

// Jump goes on in another chain and, where that does not decide, comes back.
func Jump(chain string) List { return List{&Verdict{Kind: VerdictJump, Chain: chain}} }

// Return goes back to the chain that jumped here.
func Return() List { return List{&Verdict{Kind: VerdictReturn}} }

// Refuse answers a packet, see Reject.
func Refuse(kind uint32, code byte) List { return List{&Reject{Type: kind, Code: code}} }
