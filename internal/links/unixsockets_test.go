package links

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// unixMessage is a struct unix_diag_msg with a socket's name and user.
func unixMessage(name string, uid uint32) []byte {
	m := make([]byte, sizeofUnixMessage)
	m[0], m[1], m[2] = unix.AF_UNIX, unix.SOCK_STREAM, listening
	attribute := func(kind uint16, value []byte) {
		m = binary.NativeEndian.AppendUint16(m, uint16(unix.SizeofRtAttr+len(value)))
		m = append(binary.NativeEndian.AppendUint16(m, kind), value...)
		m = append(m, make([]byte, -len(value)&3)...)
	}
	attribute(netlink.UNIX_DIAG_NAME, []byte(name))
	attribute(netlink.UNIX_DIAG_UID, binary.NativeEndian.AppendUint32(nil, uid))
	return m
}

// FuzzOwnerOf checks that a socket has an owner only where the kernel tells its abstract name and its user, and that
// those that were written are read.
func FuzzOwnerOf(f *testing.F) {
	whole := unixMessage("\x00landfall/speaker", 1000)
	f.Add(whole, "landfall/speaker", uint32(1000))
	f.Add(whole[:len(whole)-1], "a", uint32(0))               // half a user
	f.Add(whole[:len(whole)-8], "@", uint32(1<<32-1))         // no user
	f.Add(unixMessage("/run/a.sock", 0), "a\x00b", uint32(7)) // a name in the file system
	f.Add(unixMessage("\x00", 0), strings.Repeat("n", 107), uint32(7))
	f.Add(unixMessage("", 0), "", uint32(7))
	long := unixMessage("\x00abc", 0)[:sizeofUnixMessage+unix.SizeofRtAttr+5]
	binary.NativeEndian.PutUint16(long[sizeofUnixMessage:], unix.SizeofRtAttr+5)
	f.Add(long, "a", uint32(7)) // no padding at the end
	f.Add(whole[:sizeofUnixMessage], "\x00", uint32(7))
	f.Add(whole[:sizeofUnixMessage-1], "\xff", uint32(7))
	f.Fuzz(func(t *testing.T, m []byte, wantName string, wantUID uint32) {
		name, uid, ok := ownerOf(m[:len(m):len(m)])
		const least = sizeofUnixMessage + unix.SizeofRtAttr + 2 + unix.SizeofRtAttr + 4
		if ok && (len(name) < 2 || name[0] != '@' || len(m) < least) {
			t.Errorf("%x is read as %q, %d", m, name, uid)
		}
		if len(wantName) > 107 { // the kernel has no room for more
			return
		}
		name, uid, ok = ownerOf(unixMessage("\x00"+wantName, wantUID))
		if wantOK := wantName != ""; ok != wantOK || ok && (name != "@"+wantName || uid != wantUID) {
			t.Errorf("%q of user %d is read as %q, %d, %v", wantName, wantUID, name, uid, ok)
		}
		if name, _, ok := ownerOf(unixMessage("/"+wantName, wantUID)); ok {
			t.Errorf("a file is read as %q", name)
		}
	})
}
