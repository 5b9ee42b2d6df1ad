// Package faults puts toxiproxy between clients and the broker, as a library
// in the same process: a proxy that delays, closes slowly, and cuts.
package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
)

// A Proxy forwards connections to one broker. Its methods may be called
// concurrently.
type Proxy struct {
	mu    sync.Mutex // one change at a time
	proxy *toxiproxy.Proxy
}

// New returns a running proxy on a free loopback port to upstream (host:port).
// Nothing has to listen there yet.
//
// The proxy gives up its port for a moment at each cut. Meanwhile the port must
// not be given to an outgoing connection, so it comes from below the range that
// systems use for those.
func New(upstream string) (*Proxy, error) {
	const tries, first, ports = 20, 20_000, 10_000
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	var err error
	for range tries {
		addr := fmt.Sprintf("127.0.0.1:%d", first+rand.IntN(ports))
		p := &Proxy{proxy: toxiproxy.NewProxy(server, "broker", addr, upstream)}
		if err = p.proxy.Start(); err == nil {
			return p, nil
		}
	}
	return nil, err
}

// Addr is where clients connect.
func (p *Proxy) Addr() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.proxy.Listen
}

// Cut ends every connection, in both directions, with whatever is on its way. New
// connections are accepted.
func (p *Proxy) Cut() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.proxy.Stop()
	return p.startAgain()
}

// MoveTo cuts every connection and forwards new ones to another upstream.
func (p *Proxy) MoveTo(upstream string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.proxy.Stop()
	p.proxy.Upstream = upstream
	return p.startAgain()
}

// startAgain starts on the same port as before. A process that is just being
// started may still hold that port: it has a copy of every open file until it
// executes its program.
func (p *Proxy) startAgain() error {
	var err error
	for range 100 {
		if err = p.proxy.Start(); err == nil {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return err
}

// Close ends every connection and accepts no more, until the proxy is moved.
func (p *Proxy) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.proxy.Stop()
}

// Latency delays what the broker sends by a number of milliseconds, give or
// take jitter.
func (p *Proxy) Latency(millis, jitter int) error {
	return p.add("latency", map[string]int{"latency": millis, "jitter": jitter})
}

// SlowClose delays the end of a connection by a number of milliseconds, so
// that a client learns late of a broker that is gone.
func (p *Proxy) SlowClose(millis int) error {
	return p.add("slow_close", map[string]int{"delay": millis})
}

func (p *Proxy) add(kind string, attributes map[string]int) error {
	toxic, err := json.Marshal(map[string]any{
		"type": kind, "stream": "downstream", "attributes": attributes,
	})
	if err != nil {
		return err
	}
	_, err = p.proxy.Toxics.AddToxicJson(bytes.NewReader(toxic))
	return err
}

// Heal removes all delays.
func (p *Proxy) Heal() { p.proxy.Toxics.ResetToxics(context.Background()) }

// Dial connects to a proxy, and does not give up while the proxy is being cut
// and accepts no connections.
func Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	for tries := 0; err != nil && tries < 100 && ctx.Err() == nil; tries++ {
		time.Sleep(10 * time.Millisecond)
		c, err = d.DialContext(ctx, network, addr)
	}
	return c, err
}
